"""Which strategy for my machines? Measure them, predict all strategies there, check some of the predictions.

    python -m asr_am.cluster measure name=mine launcher=process learners=4
    python -m asr_am.cluster predict cluster=mine corpus=minicts corpus.hours=1 learners=4,8,16
    python -m asr_am.cluster check cluster=mine learners=4 strategy=sync,bmuf,adpsgd

measure   starts learners with the launcher, and writes conf/cluster/<name>.yaml: what links, averages and updates take
predict   hours of an epoch under all strategies by number of learners, from their own code on the virtual cluster
check     does real steps of some strategies, and sets the seconds beside the predicted ones

Computing is emulated in `check`, by learners that sleep, so that a host with few cores can have many learners.
"""
