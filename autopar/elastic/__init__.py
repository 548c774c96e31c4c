"""Training loops that go on when devices go and come."""
