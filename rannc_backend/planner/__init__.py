"""From an analysed model and a cluster to a plan."""
