"""Programs of ranks: in which order stages run, what is sent when, checked and simulated before any step."""
