//! Words in messages.

/// A count with its unit: "1 rank", "3 ranks".
pub(crate) fn counted(n: usize, unit: &str) -> String {
    format!("{n} {unit}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn one_is_singular() {
        assert_eq!(counted(0, "rank"), "0 ranks");
        assert_eq!(counted(1, "rank"), "1 rank");
        assert_eq!(counted(2, "rank"), "2 ranks");
    }
}
