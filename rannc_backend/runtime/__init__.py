"""What runs on a rank: the world, parameters, and the packages below."""
