"""Pipeline schedules as tables of tasks: made, checked and simulated."""
