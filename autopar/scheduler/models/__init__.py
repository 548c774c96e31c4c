"""Models of the seconds of a step, and of the progress that it makes."""
