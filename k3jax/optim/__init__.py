"""The optimizer, its schedule, and Quantile Balancing of the router's bias."""
