"""Models of the libraries that people use, in small, and what came of training each over two ranks."""
