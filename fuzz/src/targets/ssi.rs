//! SSI documents: parsing gives the same result however the document is cut, memory is bounded, and everything but
//! commands is text. Values and expressions are evaluated without a panic.

use gale_protocol::ssi::text::{Expression, evaluate};
use gale_protocol::ssi::{Command, Event, NAME_MAX, PARAMETERS_MAX, Parser};

const VALUE_MAX: usize = 16;

#[derive(Debug, PartialEq, Eq)]
enum Found {
    Text(Vec<u8>),
    Command(Command),
    Mistake(String),
}

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let Some((&size, document)) = data.split_first() else { return };
    let whole = parse(document, document.len().max(1));
    assert_eq!(whole, parse(document, usize::from(size).max(1)));
    assert_eq!(whole, parse(document, 1));
    for found in &whole {
        if let Found::Command(command) = found {
            check(command);
        }
    }
    if !document.windows(5).any(|window| window == b"<!--#") {
        let text: &[Found] = if document.is_empty() { &[] } else { &[Found::Text(document.into())] };
        assert_eq!(whole, text);
    }
    let _ = evaluate(document, &mut Vec::new(), |name, out| out.extend_from_slice(name));
    if let Some(expression) = Expression::parse(document) {
        assert!(expression.left.len() <= document.len());
    }
}

fn parse(document: &[u8], size: usize) -> Vec<Found> {
    let mut parser = Parser::new(VALUE_MAX);
    let mut found = Vec::new();
    for piece in document.chunks(size) {
        let mut at = 0;
        while let Some(event) = parser.next(piece, &mut at) {
            take(event, piece, &mut found);
        }
        assert_eq!(at, piece.len());
    }
    if let Some(event) = parser.end() {
        take(event, b"", &mut found);
    }
    found
}

/// Adds an event. Adjacent texts are joined.
fn take(event: Event, piece: &[u8], found: &mut Vec<Found>) {
    let text = match event {
        Event::Text(range) => &piece[range],
        Event::HeldText(text) => text,
        Event::Command(command) => return found.push(Found::Command(command)),
        Event::Mistake(message) => return found.push(Found::Mistake(message)),
    };
    assert!(!text.is_empty());
    match found.last_mut() {
        Some(Found::Text(before)) => before.extend_from_slice(text),
        _ => found.push(Found::Text(text.into())),
    }
}

fn check(command: &Command) {
    assert!((1..=NAME_MAX).contains(&command.name.len()));
    assert!(command.parameters.len() <= PARAMETERS_MAX + 1);
    for (name, value) in &command.parameters {
        assert!((1..=NAME_MAX).contains(&name.len()) && value.len() <= VALUE_MAX);
    }
}
