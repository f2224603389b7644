"""Deep models from few layers: layers that are alike, and schedules that follow from captures of some."""
