"""What only reproduces papers: their tables, published values beside ours, and figures. Nothing else imports it."""

import asr_am.stages  # noqa: F401  signals end a table as they end a stage, also during its imports
