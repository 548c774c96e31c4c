"""What people read of a plan: tables, pages and explanations."""
