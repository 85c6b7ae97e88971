from dmuon.step.driver import drive


def lives(count, log):
    def life(number):
        log.append(f"gather {number}")
        yield
        log.append(f"orthogonalize {number}")
        yield
        log.append(f"apply {number}")

    for number in range(1, count + 1):
        yield life(number)
        if number == 1:
            log.append("adamw")


def test_a_bucket_is_orthogonalized_while_its_neighbours_travel():
    log = []
    drive(lives(4, log))
    assert log == [
        *("gather 1", "adamw"),
        *("gather 2", "orthogonalize 1"),
        *("gather 3", "orthogonalize 2", "apply 1"),
        *("gather 4", "orthogonalize 3", "apply 2"),
        *("orthogonalize 4", "apply 3"),
        "apply 4",
    ]


def test_one_life_or_none_ends():
    log = []
    drive(lives(1, log))
    drive(lives(0, log))
    assert log == ["gather 1", "adamw", "orthogonalize 1", "apply 1"]
