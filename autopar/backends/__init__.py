"""Other people's clusters that runs of several processes use; each is an extra."""
