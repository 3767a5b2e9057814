"""Your own tracker (`trackers: ["docs.examples.own_tracker:Csv"]`)."""


class Csv:
    """Tracker that appends every value as a line to values.csv in the run's folder, also after a restart."""

    def begin(self, run, config, folder):
        self._path = folder / "values.csv"

    def log(self, step, values, group):
        with open(self._path, "a") as file:
            for name, value in values.items():
                file.write(f"{step},{group}/{name},{value:.6g}\n")

    def close(self):
        pass
