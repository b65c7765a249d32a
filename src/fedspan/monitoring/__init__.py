"""A read-only web page that shows a run, and the nodes of a server, while they are at work."""
