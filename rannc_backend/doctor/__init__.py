"""What `rannc doctor` looks at: this host, its launchers and devices, two ranks that are started for real,
and the report of it all.

In: the system, the environment, a launcher's command. Out: a `Finding` for each check, and a report in which
nothing secret stands.
"""
