//! Says which libsotto this program uses.

fn main() -> sotto::Result<()> {
    println!("libsotto {}", sotto::library_version()?);
    Ok(())
}
