"""Templates, rows and tokens of a teacher and its student."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.trainers.data.encoding import load_examples
from sparse_opt.trainers.data.rows import load_records
from sparse_opt.trainers.data.solved_questions import (
    SolvedQuestion,
    Templates,
    load_solved_questions,
    solved_question_reader,
)
from sparse_opt.trainers.data.teacher_data import (
    encode_solved_question,
    load_teacher_examples,
    main,
    read_templates,
    split_explanation,
    teacher_demonstration,
)

SOLVED = SolvedQuestion("What is {solution} times 2?", r"\frac{84}{2} = 42 {question}", "Half of 84.\n\n")
SHORT = Templates(
    teacher_system="",
    teacher_user="Q: {question}\n",
    teacher_start="S: {solution}\nE: ",
    explanation_end="#",
    student_system="",
    student_user="Q: {question}\n",
    student_answer="E: {explanation}\nS: {solution}.",
)


def test_plain_text_is_put_together_verbatim(tokenizer):
    example = encode_solved_question(tokenizer, SOLVED, SHORT)
    assert example.text == f"Q: {SOLVED.question}\nS: {SOLVED.solution}\nE: "
    assert example.ids == tokenizer(example.text)["input_ids"]
    assert example.ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in example.ids[1:]
    explanation = tokenizer(" two words", add_special_tokens=False)["input_ids"]
    student = example.student_sequence(explanation)
    assert student.ids[student.explanation] == explanation
    assert tokenizer.decode(student.ids[student.solution]) == SOLVED.solution
    assert tokenizer.decode(student.ids) == f"<s>Q: {SOLVED.question}\nE:  two words\nS: {SOLVED.solution}"
    assert example.student_sequence([]).explanation == slice(len(example.student_start), len(example.student_start))


def test_chat_template_writes_the_turns(chat_tokenizer):
    example = encode_solved_question(chat_tokenizer, SOLVED, Templates())
    templates = Templates()
    assert example.text == (
        f"<s><|system|>{templates.teacher_system}</s><|user|>{SOLVED.question}</s><|assistant|>"
        f"<|begin_of_solution|>\n\n{SOLVED.solution}\n\n<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n"
    )
    assert example.ids.count(chat_tokenizer.bos_token_id) == 1
    student = chat_tokenizer.decode(example.student_sequence([]).ids)
    assert student == (
        f"<s><|system|>{templates.student_system}</s><|user|>{SOLVED.question}</s><|assistant|><|begin_of_thought|>"
        f"\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n{SOLVED.solution}"
    )


def test_a_student_has_its_own_chat_template(chat_tokenizer, tokenizer):
    example = encode_solved_question(chat_tokenizer, SOLVED, SHORT, student_tokenizer=tokenizer)
    assert example.text.startswith("<s><|user|>Q: ")
    assert tokenizer.decode(example.student_start) == f"<s>Q: {SOLVED.question}\nE: "


@pytest.mark.parametrize(
    ("completion", "explanation", "closed"),
    [
        ("It is so.#", "It is so.", True),
        ("It is so.# and # more", "It is so.", True),
        ("#", "", True),
        ("It is so.", "It is so.", False),
        ("é ü 漢#", "é ü 漢", True),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_an_explanation_ends_at_the_tag(tokenizer, completion, explanation, closed, ends):
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * ends
    count, found = split_explanation(tokenizer, ids, "#", [tokenizer.eos_token_id])
    assert (tokenizer.decode(ids[:count]), found) == (explanation, closed)


def test_a_tag_of_many_tokens_is_found_whole(tokenizer):
    tag = Templates().explanation_end
    ids = tokenizer(f"so<|end_of_explanation| {tag} {tag}", add_special_tokens=False)["input_ids"]
    count, closed = split_explanation(tokenizer, ids, tag, [])
    assert closed and tokenizer.decode(ids[:count]).rstrip() == "so<|end_of_explanation|"
    assert split_explanation(tokenizer, ids[:3], tag, []) == (3, False)


def test_a_token_that_holds_the_tags_beginning_is_the_tags():
    pieces = ["so", " it", " is.<", "end", ">\n"]
    words = SimpleNamespace(decode=lambda ids: "".join(pieces[i] for i in ids))
    assert split_explanation(words, [0, 1, 2, 3, 4], "<end>", [9]) == (2, True)


@pytest.mark.parametrize(
    ("row", "solved"),
    [
        ({"question": "q", "solution": "s", "reasoning_trace": "r", "answer": "a"}, SolvedQuestion("q", "s", "r")),
        ({"problem": "q", "answer": "a"}, SolvedQuestion("q", "a")),
        ({"prompt": "q", "solution": "s", "explanation": "e"}, SolvedQuestion("q", "s", "e")),
        (
            {
                "system": "x",
                "conversations": [
                    {"from": "user", "value": "q"},
                    {
                        "from": "assistant",
                        "value": "<|begin_of_thought|>\n\nFirst.\n\nThen.\n\n<|end_of_thought|>\n\n"
                        "<|begin_of_solution|>\nIt is\n\n{4}.\n<|end_of_solution|>",
                    },
                ],
            },
            SolvedQuestion("q", "It is\n\n{4}.", "First.\n\nThen.\n\n"),
        ),
    ],
    ids=["solution-before-answer", "problem", "prompt", "stratos"],
)
def test_rows_by_their_columns(row, solved):
    assert solved_question_reader(row, "rows", Templates())(row) == solved


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "chosen": "c"}, r"rows: found columns \(chosen, question\); expected one of \(question, "),
        ({"question": "q", "solution": " "}, "column 'solution' is ' '"),
        ({"question": None, "solution": "s"}, "column 'question' is 'None'"),
        ({"conversations": [{"from": "user", "value": "q"}]}, "with user and assistant"),
        (
            {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "It is 4."}]},
            r"text is 'It is 4\.'\.\.\.: expected the form of template student_answer",
        ),
    ],
)
def test_rows_without_a_solved_question(row, message):
    with pytest.raises(DataError, match=message):
        solved_question_reader(row, "rows", Templates())(row)


@pytest.fixture
def questions_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"{n} + 1 is", "solution": str(n + 1), "explanation": f"after {n}"} for n in range(12)]
    rows[5]["question"] = "a long question, " * 20
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_examples_too_long_are_left_out_and_counted(tokenizer, questions_file):
    examples, report = load_teacher_examples(str(questions_file), "train", tokenizer, SHORT, max_prompt_length=60)
    assert (report.n_rows, report.n_examples, report.n_dropped_too_long) == (12, 11, 1)
    assert str(report) == "11 examples from 12 rows; 1 dropped for a prompt longer than max_prompt_length"
    assert [example.solved.solution for example in examples] == [str(n + 1) for n in range(12) if n != 5]
    with pytest.raises(DataError, match="no examples left"):
        load_teacher_examples(str(questions_file), "train", tokenizer, SHORT, max_prompt_length=3)


def test_a_subset_is_drawn_with_the_seed(questions_file):
    draws = [load_solved_questions(str(questions_file), "train", SHORT, subset_size=5, seed=seed) for seed in (0, 0, 1)]
    assert len(draws[0]) == 5 and draws[0] == draws[1] != draws[2]


def test_a_tokenizer_that_needs_the_whole_text_is_refused(tokenizer):
    """One that puts a space before every piece, as some SentencePiece ones do."""

    def spaced(text, add_special_tokens=True):
        return tokenizer(" " + text, add_special_tokens=add_special_tokens)

    class Spaced:
        bos_token, chat_template, decode = None, None, staticmethod(tokenizer.decode)
        __call__ = staticmethod(spaced)

    with pytest.raises(DataError, match="separately tokenized pieces"):
        encode_solved_question(Spaced(), SolvedQuestion("q", "s"), SHORT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_start": "explain: "}, r"'teacher_start' have no \{solution\}"),
        ({"student_user": "{question} {solution}"}, r"have \{solution\}, a field of other templates"),
        ({"student_answer": "{solution} {explanation}"}, r"'student_answer': expected \{explanation\} and after it"),
        ({"explanation_end": ""}, "'explanation_end' is empty"),
    ],
)
def test_templates_that_lack_a_field(changes, message):
    Templates().check_templates()
    with pytest.raises(ConfigError, match=message):
        Templates(**changes).check_templates()


def test_demonstrations_are_trained_after_the_prompt_that_a_teacher_gets(
    chat_tokenizer, tmp_path, questions_file, capsys
):
    chat_tokenizer.save_pretrained(tmp_path / "teacher")
    output = tmp_path / "rows" / "teacher.jsonl"
    words = ["--dataset", str(questions_file), "--tokenizer", str(tmp_path / "teacher"), "--output", str(output)]
    other = tmp_path / "rlt.yaml"
    other.write_text("n_steps: 3\nexplanation_end: ''\n")
    assert main([*words, "--templates", str(other)]) == 2
    assert "'explanation_end' is empty" in capsys.readouterr().err
    other.write_text("n_steps: 3\nexplanation_end: '#'\n")
    assert read_templates(other) == Templates(explanation_end="#")
    assert main([*words, "subset_size=4"]) == 0
    assert capsys.readouterr().out == f"4 rows in {output}\n"
    assert len(load_records(str(output))) == 4
    sequences, report = load_examples("demonstration", str(output), "train", chat_tokenizer, max_length=4000)
    assert report.n_moved_borders == 0
    questions = load_solved_questions(str(questions_file), "train", Templates(), subset_size=4)
    for (sequence,), solved in zip(sequences, questions, strict=True):
        assert sequence.ids[: sequence.prompt_length] == encode_solved_question(chat_tokenizer, solved, Templates()).ids
        completion = chat_tokenizer.decode(sequence.ids[sequence.prompt_length :])
        assert completion == f"{solved.explanation}<|end_of_explanation|></s>"
    assert main(words) == 2
    assert f"{output} exists" in capsys.readouterr().err
    with pytest.raises(DataError, match="no explanation; expected a column of"):
        teacher_demonstration(chat_tokenizer, SolvedQuestion("q", "s"), Templates())
