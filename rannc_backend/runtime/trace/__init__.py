"""What steps took: seconds, bytes, events."""
