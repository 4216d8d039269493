//! Server Side Includes: finds commands in a document that arrives in pieces.
//! (<https://nginx.org/en/docs/http/ngx_http_ssi_module.html#commands>)
//!
//! ```text
//!   text <!--#command parameter1=value1 parameter2=value2 ... --> text
//!        └─ opening                                          └─ closing
//! ```
//!
//! Knows the syntax of commands, but not their meaning. Text is not copied: events refer to the current piece.
//! Exception: the beginning of an opening at the end of a piece that turns out to be text is returned as text of its
//! own. The parser stores only one command (its name and up to [`PARAMETERS_MAX`] parameters, with names of up to
//! [`NAME_MAX`] bytes and values up to the caller's limit) and one message. The states are nginx's, including their
//! quirks: after a mistake everything up to `-->` is ignored.

pub mod text;

use std::ops::Range;

use bstr::BStr;

/// Maximum length of the name of a command or parameter.
pub const NAME_MAX: usize = 32;

/// Maximum number of parameters of a command.
pub const PARAMETERS_MAX: usize = 16;

const OPENING: &[u8] = b"<!--#";

/// A part of the document.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Text: a range of the current piece.
    Text(Range<usize>),
    /// Text at the end of earlier pieces that was held back.
    HeldText(&'static [u8]),
    /// A command.
    Command(Command),
    /// An invalid command, with nginx's error message.
    Mistake(String),
}

/// A command as written in the document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Command {
    /// Name.
    pub name: Vec<u8>,
    /// Names and values of the parameters, in order; one more than [`PARAMETERS_MAX`] if there are too many.
    pub parameters: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Command {
    /// Appends the command as text: as in the document, except for blanks and the kind of quotes.
    pub fn append_text(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(OPENING);
        out.extend_from_slice(&self.name);
        for (name, value) in &self.parameters {
            out.extend_from_slice(&[b" ", &name[..], b"=\"", value, b"\""].concat());
        }
        out.extend_from_slice(b" -->");
    }
}

/// Finds commands in the pieces of a document.
#[derive(Debug)]
pub struct Parser {
    state: State,
    value_max: usize,
    command: Command,
    mistake: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Text,
    /// After so many bytes of the opening.
    Opening(usize),
    BeforeCommand,
    Command,
    BeforeParameter,
    Parameter,
    BeforeEqual,
    BeforeValue,
    Value {
        quote: u8,
        is_escaped: bool,
    },
    AfterValue,
    Closing(usize),
    Wrong,
    WrongClosing(usize),
}

impl Parser {
    /// Creates a parser at the beginning of a document, for values of at most `value_max` bytes.
    pub fn new(value_max: usize) -> Parser {
        let (command, mistake) = Default::default();
        Parser { state: State::Text, value_max, command, mistake }
    }

    /// Returns the next event in `piece` from `at` on, and moves `at` behind it. Returns `None` at the end of the
    /// piece; the next call is for the next piece, from 0 on, or for the same piece with more bytes appended.
    pub fn next(&mut self, piece: &[u8], at: &mut usize) -> Option<Event> {
        if matches!(self.state, State::Text | State::Opening(_)) {
            let event = self.next_text(piece, at);
            if event.is_some() || *at == piece.len() {
                return event;
            }
        }
        while let Some(&byte) = piece.get(*at) {
            *at += 1;
            if let Some(event) = self.handle(byte) {
                self.state = State::Text;
                return Some(event);
            }
        }
        None
    }

    /// Handles the end of the document: returns text held back, or the mistake in an unfinished command.
    pub fn end(&mut self) -> Option<Event> {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Opening(length) => Some(Event::HeldText(&OPENING[..length])),
            State::Wrong | State::WrongClosing(_) => Some(Event::Mistake(std::mem::take(&mut self.mistake))),
            _ => None,
        }
    }

    /// Processes text up to the next opening or the end of the piece. Without an event, the end of the piece was
    /// reached or an opening is complete.
    fn next_text(&mut self, piece: &[u8], at: &mut usize) -> Option<Event> {
        let start = *at;
        // Number of bytes of an opening at the end of the previous pieces.
        let held = if let State::Opening(length) = self.state { length } else { 0 };
        while let Some(&byte) = piece.get(*at) {
            match self.state {
                State::Opening(length) if OPENING[length] == byte => {
                    *at += 1;
                    self.state = State::Opening(length + 1);
                    if length + 1 == OPENING.len() {
                        self.state = State::BeforeCommand;
                        self.command = Command::default();
                        return text(start, at.saturating_sub(OPENING.len()));
                    }
                }
                State::Opening(_) => {
                    self.state = State::Text;
                    if held > 0 {
                        // The bytes held back are text; those of this piece are processed again.
                        *at = start;
                        return Some(Event::HeldText(&OPENING[..held]));
                    }
                }
                _ => match memchr::memchr(b'<', &piece[*at..]) {
                    Some(offset) => {
                        *at += offset + 1;
                        self.state = State::Opening(1);
                    }
                    None => *at = piece.len(),
                },
            }
        }
        // The possible beginning of an opening is held back.
        let opening = if let State::Opening(length) = self.state { length } else { 0 };
        text(start, at.saturating_sub(opening))
    }

    /// Processes one byte of a command. An event ends the command.
    fn handle(&mut self, byte: u8) -> Option<Event> {
        let is_blank = matches!(byte, b' ' | b'\r' | b'\n' | b'\t');
        let (name_length, value_length) =
            self.command.parameters.last().map_or((0, 0), |(name, value)| (name.len(), value.len()));
        self.state = match self.state {
            State::Text | State::Opening(_) => unreachable!("text is handled in one go"),
            State::BeforeCommand if is_blank => State::BeforeCommand,
            State::BeforeCommand => {
                self.command.name.push(byte);
                State::Command
            }
            State::Command if is_blank => State::BeforeParameter,
            State::Command if byte == b'-' => State::Closing(1),
            State::Command if self.command.name.len() == NAME_MAX => {
                let name = BStr::new(&self.command.name);
                self.wrong(format!("the \"{name}{}...\" SSI command is too long", byte as char))
            }
            State::Command => {
                self.command.name.push(byte);
                State::Command
            }
            State::BeforeParameter if is_blank => State::BeforeParameter,
            State::BeforeParameter if byte == b'-' => State::Closing(1),
            State::BeforeParameter => {
                // At most one parameter too many is stored, which indicates the error.
                self.command.parameters.truncate(PARAMETERS_MAX);
                self.command.parameters.push((vec![byte], Vec::new()));
                State::Parameter
            }
            State::Parameter if is_blank => State::BeforeEqual,
            State::Parameter if byte == b'=' => State::BeforeValue,
            State::Parameter if byte == b'-' => self.unexpected(byte, "after"),
            State::Parameter if name_length == NAME_MAX => {
                let (parameter, command) = (BStr::new(&self.parameter().0).to_owned(), BStr::new(&self.command.name));
                let byte = byte as char;
                self.wrong(format!("too long \"{parameter}{byte}...\" parameter in \"{command}\" SSI command"))
            }
            State::Parameter => {
                self.parameter().0.push(byte);
                State::Parameter
            }
            State::BeforeEqual if is_blank => State::BeforeEqual,
            State::BeforeEqual if byte == b'=' => State::BeforeValue,
            State::BeforeEqual => self.unexpected(byte, "after"),
            State::BeforeValue if is_blank => State::BeforeValue,
            State::BeforeValue if matches!(byte, b'"' | b'\'') => State::Value { quote: byte, is_escaped: false },
            State::BeforeValue => self.unexpected(byte, "before value of"),
            State::Value { quote, is_escaped: false } if byte == quote => State::AfterValue,
            State::Value { .. } if value_length == self.value_max => {
                let (name, value) = self.parameter().clone();
                let (name, value, command) = (BStr::new(&name), BStr::new(&value), BStr::new(&self.command.name));
                let byte = byte as char;
                self.wrong(format!(
                    "too long \"{value}{byte}...\" value of \"{name}\" parameter in \"{command}\" SSI command"
                ))
            }
            State::Value { quote, is_escaped } => {
                self.parameter().1.push(byte);
                State::Value { quote, is_escaped: byte == b'\\' && !is_escaped }
            }
            State::AfterValue if is_blank => State::BeforeParameter,
            State::AfterValue if byte == b'-' => State::Closing(1),
            State::AfterValue => {
                let (name, value) = self.parameter().clone();
                let (name, value, command) = (BStr::new(&name), BStr::new(&value), BStr::new(&self.command.name));
                let byte = byte as char;
                self.wrong(format!(
                    "unexpected \"{byte}\" symbol after \"{value}\" value of \"{name}\" parameter in \"{command}\" \
                     SSI command"
                ))
            }
            State::Closing(1) if byte == b'-' => State::Closing(2),
            State::Closing(2) if byte == b'>' => return Some(Event::Command(std::mem::take(&mut self.command))),
            State::Closing(_) => {
                let (byte, command) = (byte as char, BStr::new(&self.command.name));
                self.wrong(format!("unexpected \"{byte}\" symbol in \"{command}\" SSI command"))
            }
            State::Wrong if byte == b'-' => State::WrongClosing(1),
            State::WrongClosing(1) if byte == b'-' => State::WrongClosing(2),
            State::WrongClosing(2) if byte == b'>' => return Some(Event::Mistake(std::mem::take(&mut self.mistake))),
            State::Wrong | State::WrongClosing(_) => State::Wrong,
        };
        None
    }

    fn parameter(&mut self) -> &mut (Vec<u8>, Vec<u8>) {
        self.command.parameters.last_mut().expect("a parameter has begun")
    }

    fn unexpected(&mut self, byte: u8, place: &str) -> State {
        let parameter = BStr::new(&self.parameter().0).to_owned();
        let command = BStr::new(&self.command.name);
        let shown = byte as char;
        self.mistake =
            format!("unexpected \"{shown}\" symbol {place} \"{parameter}\" parameter in \"{command}\" SSI command");
        if byte == b'-' { State::WrongClosing(1) } else { State::Wrong }
    }

    fn wrong(&mut self, message: String) -> State {
        self.mistake = message;
        State::Wrong
    }
}

fn text(start: usize, end: usize) -> Option<Event> {
    (end > start).then_some(Event::Text(start..end))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the parts of a document that arrives in these pieces; consecutive texts are joined.
    fn parse(pieces: &[&[u8]]) -> Vec<String> {
        let mut parser = Parser::new(20);
        let mut found: Vec<String> = Vec::new();
        let mut text = Vec::new();
        let end = |found: &mut Vec<String>, text: &mut Vec<u8>| {
            if !text.is_empty() {
                found.push(String::from_utf8(std::mem::take(text)).unwrap());
            }
        };
        let take = |event, piece: &[u8], found: &mut Vec<String>, text: &mut Vec<u8>| match event {
            Event::Text(range) => text.extend_from_slice(&piece[range]),
            Event::HeldText(held) => text.extend_from_slice(held),
            Event::Command(command) => {
                end(found, text);
                let mut shown = Vec::new();
                command.append_text(&mut shown);
                found.push(String::from_utf8(shown).unwrap());
            }
            Event::Mistake(message) => {
                end(found, text);
                found.push(format!("! {message}"));
            }
        };
        for piece in pieces {
            let mut at = 0;
            while let Some(event) = parser.next(piece, &mut at) {
                take(event, piece, &mut found, &mut text);
            }
            assert_eq!(at, piece.len());
        }
        if let Some(event) = parser.end() {
            take(event, b"", &mut found, &mut text);
        }
        end(&mut found, &mut text);
        found
    }

    /// Checks the result for the whole document, byte by byte, and for each split into two pieces.
    #[track_caller]
    fn check(document: &str, expected: &[&str]) {
        let document = document.as_bytes();
        assert_eq!(parse(&[document]), expected);
        assert_eq!(parse(&document.chunks(1).collect::<Vec<_>>()), expected);
        for at in 0..=document.len() {
            assert_eq!(parse(&[&document[..at], &document[at..]]), expected, "in two pieces at {at}");
        }
    }

    #[test]
    fn commands_stand_in_text() {
        check("", &[]);
        check("only text", &["only text"]);
        check("a<!--# echo var=\"x\" -->b", &["a", "<!--#echo var=\"x\" -->", "b"]);
        check(
            "<!--#endif--><!--#\n\tset\r\nvar = 'a' value=\"b c\"-->",
            &["<!--#endif -->", "<!--#set var=\"a\" value=\"b c\" -->"],
        );
        check("<!--#x a='\\'' b=\"\\\\\"-->", &["<!--#x a=\"\\'\" b=\"\\\\\" -->"]);
    }

    #[test]
    fn text_that_resembles_a_command_stays_text() {
        for text in ["<", "<!", "<!-", "<!--", "a<b", "<<", "<!<!-<!--<", "<!-- comment -->", "<!---#x-->", "<b>a</b>"]
        {
            check(text, &[text]);
        }
        check("<<!--#x-->", &["<", "<!--#x -->"]);
        check("<!<!--#x-->", &["<!", "<!--#x -->"]);
        check("<!--<!--#x--><!--", &["<!--", "<!--#x -->", "<!--"]);
        check("<!--#x--", &[]);
    }

    #[test]
    fn mistakes_are_told_in_nginx_s_words_and_passed_over() {
        check("<!--#x y-->.", &["! unexpected \"-\" symbol after \"y\" parameter in \"x\" SSI command", "."]);
        check("<!--#x y z-->", &["! unexpected \"z\" symbol after \"y\" parameter in \"x\" SSI command"]);
        check("<!--#x y=z-->", &["! unexpected \"z\" symbol before value of \"y\" parameter in \"x\" SSI command"]);
        check("<!--#x y=-->", &["! unexpected \"-\" symbol before value of \"y\" parameter in \"x\" SSI command"]);
        let after = "! unexpected \"z\" symbol after \"a\" value of \"y\" parameter in \"x\" SSI command";
        check("<!--#x y=\"a\"z-- -->", &[after]);
        check("<!--#x-y-->", &["! unexpected \"y\" symbol in \"x\" SSI command"]);
        check("<!--#x--->-->", &["! unexpected \"-\" symbol in \"x\" SSI command"]);
        check("<!--#x y", &[]);
        check("<!--#x y=z", &["! unexpected \"z\" symbol before value of \"y\" parameter in \"x\" SSI command"]);
    }

    #[test]
    fn lengths_are_bounded() {
        let name = "n".repeat(NAME_MAX);
        check(&format!("<!--#{name}-->"), &[&format!("<!--#{name} -->")]);
        check(&format!("<!--#{name}m-->"), &[&format!("! the \"{name}m...\" SSI command is too long")]);
        check(
            &format!("<!--#x {name}m='' -->"),
            &[&format!("! too long \"{name}m...\" parameter in \"x\" SSI command")],
        );
        let value = "v".repeat(20);
        check(&format!("<!--#x y='{value}'-->"), &[&format!("<!--#x y=\"{value}\" -->")]);
        check(
            &format!("<!--#x y='{value}w'-->"),
            &[&format!("! too long \"{value}w...\" value of \"y\" parameter in \"x\" SSI command")],
        );
        let mut parser = Parser::new(20);
        let document = format!("<!--#x{}-->", " y=''".repeat(1000));
        let Some(Event::Command(command)) = parser.next(document.as_bytes(), &mut 0) else { panic!() };
        assert_eq!(command.parameters.len(), PARAMETERS_MAX + 1);
    }
}
