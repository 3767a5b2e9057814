"""A callback of one's own, for a config: `callbacks: ["docs.examples.own_callback:Told"]`. Any of its methods do."""


class Told:
    """Says in the logs of a run what others would send to a chat."""

    def on_step(self, island, local_step, metrics):
        if metrics["loss"] != metrics["loss"]:
            print(f"{island}: the loss of step {local_step} is no number", flush=True)

    def on_round(self, global_step, fragment_id, members):
        self.newest = f"fragment {fragment_id} of {len(members)} islands"

    def on_eval(self, global_step, values):
        print(f"evaluated at {global_step}: {values['eval_loss']:.3f}, after {self.newest}", flush=True)

    def on_event(self, kind, text):
        print(f"event {kind}: {text}", flush=True)
