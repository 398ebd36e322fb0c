"""How gradients become updates: one rule table, AdamW, Muon, schedules as pure functions."""
