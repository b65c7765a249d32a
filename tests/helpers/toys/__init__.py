"""Published methods as small toys over the real interface, each against a dense oracle written by hand."""
