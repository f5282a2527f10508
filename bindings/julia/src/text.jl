# Words in messages.

# A count with its unit: "1 rank", "3 ranks".
counted(n, unit) = "$n $unit$(n == 1 ? "" : "s")"
