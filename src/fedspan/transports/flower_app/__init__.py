"""The methods as a Flower app, on Flower's public interface alone."""
