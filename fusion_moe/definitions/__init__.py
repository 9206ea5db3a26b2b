"""Operations: schemas, fakes, and the translators that say in the IR what an operation computes."""
