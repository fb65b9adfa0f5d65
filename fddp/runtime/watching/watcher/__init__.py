"""The watcher process of a rank. It loads only the standard library and this package."""
