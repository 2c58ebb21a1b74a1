"""The kinds of task that a recipe may name. Reading this costs no torch."""

from windlass.recipes.task import Task
from windlass.recipes.tasks.classification import Classification
from windlass.recipes.tasks.image_classification import ImageClassification
from windlass.recipes.tasks.language_modelling import CausalLM, MaskedLM
from windlass.recipes.tasks.preference_tuning import AnswerJudging, PreferenceTuning, RewardModelling
from windlass.recipes.tasks.seq2seq import Seq2Seq
from windlass.recipes.tasks.supervised_tuning import SupervisedTuning

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
