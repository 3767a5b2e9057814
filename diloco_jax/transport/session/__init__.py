"""Sessions: order, repetition and assembly of what travels on one link."""
