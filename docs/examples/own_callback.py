"""Your own callback (`callbacks: ["docs.examples.own_callback:Told"]`). Each of its methods is optional."""


class Told:
    """Callback that prints messages to the log of a run, where others would send them to a chat."""

    def on_step(self, island, local_step, metrics):
        if metrics["loss"] != metrics["loss"]:
            print(f"{island}: the loss of step {local_step} is not a number", flush=True)

    def on_round(self, global_step, fragment_id, members):
        self.newest = f"fragment {fragment_id} of {len(members)} islands"

    def on_eval(self, global_step, values):
        print(f"evaluated at {global_step}: {values['eval_loss']:.3f}, after {self.newest}", flush=True)

    def on_event(self, kind, text):
        print(f"event {kind}: {text}", flush=True)
