"""The kinds of task that a recipe may name. Reading this costs no torch."""

from windlass.cli.task import Task
from windlass.cli.tasks.answer_judging import AnswerJudging
from windlass.cli.tasks.causal_lm import CausalLM
from windlass.cli.tasks.classification import Classification
from windlass.cli.tasks.image_classification import ImageClassification
from windlass.cli.tasks.masked_lm import MaskedLM
from windlass.cli.tasks.preference_tuning import PreferenceTuning
from windlass.cli.tasks.reward_modelling import RewardModelling
from windlass.cli.tasks.seq2seq import Seq2Seq
from windlass.cli.tasks.supervised_tuning import SupervisedTuning

# In the order in which messages list them.
TASKS: dict[str, Task] = {
    CausalLM.name: CausalLM(),
    Classification.name: Classification(),
    MaskedLM.name: MaskedLM(),
    Seq2Seq.name: Seq2Seq(),
    ImageClassification.name: ImageClassification(),
    SupervisedTuning.name: SupervisedTuning(),
    PreferenceTuning.name: PreferenceTuning(),
    RewardModelling.name: RewardModelling(),
    AnswerJudging.name: AnswerJudging(),
}
