"""Training of draft heads in plain torch: text from the model itself, cached hidden states, one trainer."""

from .backbone import Backbone, JointOptions
from .calibrate import measure_accuracies, save_accuracies
from .data import GenerationOptions, generate_conversations, read_conversations
from .generate import Conversation, Limits
from .head_loss import HeadOptions
from .hidden import HiddenStates, cache_hidden_states
from .kangaroo import AdapterOptions, measure_agreement, train_adapter, train_kangaroo
from .losses import linear_cross_entropy, medusa_loss
from .medusa import train_heads, train_medusa
from .medusa_live import train_live
from .processes import Processes
from .trainer import Trainer, TrainerOptions

__all__ = [
    "AdapterOptions",
    "Backbone",
    "Conversation",
    "GenerationOptions",
    "HeadOptions",
    "HiddenStates",
    "JointOptions",
    "Limits",
    "Processes",
    "Trainer",
    "TrainerOptions",
    "cache_hidden_states",
    "generate_conversations",
    "linear_cross_entropy",
    "measure_accuracies",
    "measure_agreement",
    "medusa_loss",
    "read_conversations",
    "save_accuracies",
    "train_adapter",
    "train_heads",
    "train_kangaroo",
    "train_live",
    "train_medusa",
]
