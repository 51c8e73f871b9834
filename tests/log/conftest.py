from kit.folders import clock, folder, opener, root

__all__ = ["clock", "folder", "opener", "root"]
