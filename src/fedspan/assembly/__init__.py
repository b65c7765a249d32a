"""Assembly: model, data, engine, clients and federation of a run, each built in one place from its config."""
