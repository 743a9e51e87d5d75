"""Search of the fastest parallel layout: device profiles, predicted seconds, layouts that fit."""
