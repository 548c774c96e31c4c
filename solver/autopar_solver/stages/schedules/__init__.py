"""Pipeline schedules as tables of tasks: builds, checks and simulates them."""
