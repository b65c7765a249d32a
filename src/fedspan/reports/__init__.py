"""What runs look like, as one page: read from their folders, grouped, drawn, and said in words."""
