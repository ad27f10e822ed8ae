"""T5X: an action that exports after each round of training.

In gin: `train.actions = {'TRAIN': [@ExportAction()]}` and `ExportAction.root = %MODEL_DIR`.
"""

from t5x import trainer

import wherry


class ExportAction(trainer.BaseAction):
    """Exports the parameters to Hugging Face; never stops training."""

    def __init__(self, root):
        self.root = root
        self.handle = None

    def run(self, train_state, metrics_by_task):
        """Called by T5X with the train state and the metrics by task."""
        step = int(train_state.step)
        self.handle = wherry.export(
            train_state.state_dict(),
            f"{self.root}/huggingface/{step}",
            to="huggingface",
            system="t5x-orbax",
            only="params",
            step=step,
            meta={f"tasks.{task}": "trained" for task in metrics_by_task},
        )
        return False
