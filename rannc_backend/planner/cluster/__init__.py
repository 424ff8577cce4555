"""The machines that are planned for: described, or measured."""
