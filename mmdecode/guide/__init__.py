"""Guides, which compute the target distribution from the logits of one or more branches."""

from mmdecode.guide.adaptvis import AdaptVis
from mmdecode.guide.agla import AGLA
from mmdecode.guide.bias import Bias
from mmdecode.guide.causalmm import CausalMM
from mmdecode.guide.cfg import CFG
from mmdecode.guide.cfg_image import CFGImage
from mmdecode.guide.conscious_gaze import ConsciousGaze
from mmdecode.guide.controls.margin_shift import MarginShift
from mmdecode.guide.controls.near_ties import NearTies
from mmdecode.guide.controls.plausible import Plausible, TemperatureMatched
from mmdecode.guide.controls.prompt_bias import PromptBias
from mmdecode.guide.dagcd import DAGCD
from mmdecode.guide.damro import DAMRO
from mmdecode.guide.dcla import DCLA
from mmdecode.guide.dfd import DFD
from mmdecode.guide.dola import DoLa
from mmdecode.guide.guidance import Guidance
from mmdecode.guide.icd import ICD
from mmdecode.guide.linear import Contrast, Linear
from mmdecode.guide.m3id import M3ID
from mmdecode.guide.pai import PAI
from mmdecode.guide.rbd import RBD
from mmdecode.guide.ritual import RITUAL
from mmdecode.guide.scalingvis import ScalingVis
from mmdecode.guide.vcd import VCD

__all__ = [
    "AGLA",
    "CFG",
    "DAGCD",
    "DAMRO",
    "DCLA",
    "DFD",
    "ICD",
    "M3ID",
    "PAI",
    "RBD",
    "RITUAL",
    "VCD",
    "AdaptVis",
    "Bias",
    "CFGImage",
    "CausalMM",
    "ConsciousGaze",
    "Contrast",
    "DoLa",
    "Guidance",
    "Linear",
    "MarginShift",
    "NearTies",
    "Plausible",
    "PromptBias",
    "ScalingVis",
    "TemperatureMatched",
]
