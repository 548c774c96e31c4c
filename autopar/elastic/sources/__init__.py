"""Where events come from. The core knows no source; each is a thin adapter."""
