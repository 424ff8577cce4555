"""The schedules that there are, one a module."""
