from hypothesis import settings

# A busy machine must not fail a property.
settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")
