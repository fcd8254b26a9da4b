"""Running a schedule on real stages: the interpreter, its workers, and who drives them."""
