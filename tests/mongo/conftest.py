from kit.mongod import mongo_url

__all__ = ["mongo_url"]
