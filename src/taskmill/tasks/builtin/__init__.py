"""The tasksets that come along. Packages of extras are imported only by those that need them, when they load."""
