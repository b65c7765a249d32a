"""What several tests use: tiny models and data, transports, watched rounds, scripts that run as processes."""
