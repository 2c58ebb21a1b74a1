"""Models that are larger than a device: device maps, hooks around a forward, weights offloaded to files."""
