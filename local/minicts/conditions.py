"""All parameters that set how hard minicts is to recognise, and the version of the corpus they belong to.

There are two conditions, as in Hub5'00. Train, dev and the `sw_*` half of the test set are SW. The `en_*` half is the
harder EN (accents and voices unseen in training, faster, noisier, more hesitant). Raise VERSION with any change: error
rates are only comparable within one version.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 1
SAMPLING_RATE = 8000

WORDS_PER_SECOND = 3.4  # of speech with padding, converts hours to words (a conversation is planned as text)
WORDS_PER_CONVERSATION = 250
WORDS_PER_TEST_CONVERSATION = 190
DEV_SHARE = 0.08  # of the training hours

Range = tuple[float, float]


@dataclass(frozen=True)
class Condition:
    """Parameters of one condition. Ranges are drawn from uniformly, per speaker, conversation side or utterance."""

    name: str
    # speaker: espeak-ng accents with weights, base voices, and their variation
    accents: dict[str, float]
    male_voices: tuple[str, ...]
    female_voices: tuple[str, ...]
    words_per_minute: Range
    pitch: Range  # espeak's scale, 50 = the voice's own
    pitch_range: Range  # espeak's scale, 50 = the voice's own, 0 = monotone
    tract: Range  # scale of formants (and pitch)
    # style: probabilities per word (or per utterance)
    filler: Range  # UH, UM
    repeat: Range
    fragment: Range
    vocal_noise: float  # per utterance: [LAUGHTER] or [NOISE]
    # room, telephone and line of one conversation side
    snr_db: Range
    reverberation_s: Range  # time to decay by 60 dB
    direct_to_reverberant_db: Range
    low_edge_hz: Range
    high_edge_hz: Range
    tilt_db_per_octave: Range
    ripple_db: float
    drive: Range  # non-linearity of the handset: 0 = linear
    level_dbfs: Range
    crosstalk_db: Range
    line_noise_dbfs: Range


SW = Condition(
    name="sw",
    accents={"en-US": 0.5, "en": 0.2, "en-US-nyc": 0.15, "en-GB-x-rp": 0.15},
    male_voices=(
        "",
        "m1",
        "m3",
        "m4",
        "m6",
        "m7",
        "m8",
        "Alex",
        "Mike",
        "Michael",
        "Denis",
        "Gene",
        "max",
        "robert",
        "quincy",
    ),
    female_voices=("f1", "f2", "f3", "f5", "Andrea", "anika", "linda", "steph", "grandma"),
    words_per_minute=(155, 215),
    pitch=(30, 70),
    pitch_range=(30, 80),
    tract=(0.93, 1.07),
    filler=(0.01, 0.05),
    repeat=(0.002, 0.012),
    fragment=(0.002, 0.012),
    vocal_noise=0.03,
    snr_db=(9, 26),
    reverberation_s=(0.1, 0.35),
    direct_to_reverberant_db=(2, 12),
    low_edge_hz=(230, 380),
    high_edge_hz=(3150, 3500),
    tilt_db_per_octave=(-3, 3),
    ripple_db=2.0,
    drive=(0.0, 1.0),
    level_dbfs=(-32, -22),
    crosstalk_db=(-55, -38),
    line_noise_dbfs=(-66, -54),
)

EN = Condition(
    name="en",
    accents={"en-US": 0.4, "en-GB-scotland": 0.1, "en-GB-x-gbclan": 0.5},
    male_voices=("m2", "m5", "paul", "antonio", "ed", "rob", "Nguyen", "sandro"),
    female_voices=("f4", "belinda", "steph3"),
    words_per_minute=(168, 215),
    pitch=(25, 75),
    pitch_range=(30, 90),
    tract=(0.92, 1.09),
    filler=(0.03, 0.08),
    repeat=(0.005, 0.025),
    fragment=(0.005, 0.02),
    vocal_noise=0.05,
    snr_db=(9, 24),
    reverberation_s=(0.15, 0.45),
    direct_to_reverberant_db=(1, 10),
    low_edge_hz=(250, 420),
    high_edge_hz=(3000, 3450),
    tilt_db_per_octave=(-5, 4),
    ripple_db=3.0,
    drive=(0.3, 2.0),
    level_dbfs=(-36, -22),
    crosstalk_db=(-50, -34),
    line_noise_dbfs=(-62, -50),
)
