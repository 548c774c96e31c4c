"""Reads the communication of a program from the compiler."""
