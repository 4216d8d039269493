//! Scripts of a configuration in a simulated world: text built from variables and groups equals that of a simple model,
//! and slow file checks delay no other request.

use std::time::Duration;

use gale_files::SimulatedFiles;
use gale_runtime::simulation::{Faults, Peer, Random, Sending, Simulation};
use gale_runtime::{Moment, Stream};
use proptest::prelude::*;

use crate::support::{Task, address, run};

/// Worlds for each property; some hundred run in a second.
const CASES: u32 = 150;

/// Body of the answer to a request on its own connection, and time of its arrival.
async fn ask(path: String) -> (String, Moment) {
    let stream = Stream::connect(&address()).await.expect("somebody listens");
    let request = format!("GET {path} HTTP/1.0\r\n\r\n");
    let transcript = Peer::new(vec![Sending::Bytes(request.into())]).play(stream, &Random::new(0)).await;
    let text = String::from_utf8(transcript.received).expect("text");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {head}");
    (body.to_owned(), transcript.last_received)
}

/// A server with this text in its block.
fn configuration(server: &str) -> String {
    format!(
        "error_log /log;
         events {{ }}
         http {{ access_log off; client_body_temp_path %TEMP%; server {{ listen %ADDRESS%; root /www; {server} }} }}"
    )
}

/// A part of a text with variables.
#[derive(Clone, Debug)]
enum Part {
    Literal(String),
    /// `$1` or `$2`.
    Group(usize),
    Argument,
    /// The name in braces.
    BracedArgument,
    Question,
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        3 => "[a-z/=&-]{1,4}".prop_map(Part::Literal),
        3 => (1..=2_usize).prop_map(Part::Group),
        1 => Just(Part::Argument),
        1 => Just(Part::BracedArgument),
        1 => Just(Part::Question),
    ]
}

/// Spelling of the parts, such that the text after a variable cannot be taken for a part of its name.
fn written(parts: &[Part]) -> String {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        match part {
            Part::Literal(literal) => text.push_str(literal),
            Part::Group(number) => text.push_str(&format!("${number}")),
            Part::Argument if matches!(parts.get(index + 1), Some(Part::Literal(_))) => text.push_str("${arg_q}"),
            Part::Argument => text.push_str("$arg_q"),
            Part::BracedArgument => text.push_str("${arg_q}"),
            Part::Question => text.push('?'),
        }
    }
    text
}

/// A piece of a path, encoded and decoded.
fn piece() -> impl Strategy<Value = (String, String)> {
    let piece = prop_oneof![
        4 => "[a-z&=]{1,3}".prop_map(|text| (text.clone(), text)),
        1 => Just(("%20".to_owned(), " ".to_owned())),
        1 => Just(("%26".to_owned(), "&".to_owned())),
        1 => Just(("%3f".to_owned(), "?".to_owned())),
        1 => Just(("+".to_owned(), "+".to_owned())),
    ];
    prop::collection::vec(piece, 1..4).prop_map(|pieces| pieces.into_iter().unzip())
}

/// nginx's encoding of arguments, as far as the pieces need it.
fn encoded(text: &str) -> String {
    let encode = |letter: char| match letter {
        ' ' | '&' | '?' | '+' => format!("%{:02X}", letter as u32),
        letter => letter.to_string(),
    };
    text.chars().map(encode).collect()
}

/// A request: two pieces of a path, and its arguments.
#[derive(Clone, Debug)]
struct Asked {
    pieces: [(String, String); 2],
    /// Value of the argument that texts refer to.
    argument: Option<String>,
}

fn asked() -> impl Strategy<Value = Asked> {
    let argument = prop::option::of("[a-z0-9/%-]{0,5}");
    (piece(), piece(), argument).prop_map(|(one, two, argument)| Asked { pieces: [one, two], argument })
}

impl Asked {
    fn path(&self, place: &str) -> String {
        let args = self.argument.as_ref().map(|argument| format!("?q={argument}")).unwrap_or_default();
        format!("/{place}/{}/{}{args}", self.pieces[0].0, self.pieces[1].0)
    }

    fn came_encoded(&self) -> bool {
        self.pieces.iter().any(|(sent, _)| sent.contains(['%', '+']))
    }

    fn args(&self) -> String {
        self.argument.as_ref().map(|argument| format!("q={argument}")).unwrap_or_default()
    }

    /// Value of the parts.
    fn text(&self, parts: &[Part], encodes: bool) -> String {
        let value = |part: &Part| match part {
            Part::Literal(literal) => literal.clone(),
            Part::Group(number) if encodes && self.came_encoded() => encoded(&self.pieces[number - 1].1),
            Part::Group(number) => self.pieces[number - 1].1.clone(),
            Part::Argument | Part::BracedArgument => self.argument.clone().unwrap_or_default(),
            Part::Question => "?".to_owned(),
        };
        parts.iter().map(value).collect()
    }

    /// URI after a `rewrite` to `/echo` and these parts.
    fn rewritten(&self, parts: &[Part]) -> String {
        let (parts, drops_args) = match parts.split_last() {
            Some((Part::Question, parts)) => (parts, true),
            _ => (parts, false),
        };
        let mark = parts.iter().position(|part| matches!(part, Part::Question));
        let (path, own) = parts.split_at(mark.unwrap_or(parts.len()));
        let mut args = own.split_first().map(|(_, own)| self.text(own, true)).unwrap_or_default();
        if !drops_args && mark.is_some() && self.argument.is_some() {
            args.push('&');
        }
        if !drops_args {
            args.push_str(&self.args());
        }
        format!("/echo{}?{args}", self.text(path, false))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn texts_are_put_together_as_a_plain_model_does(
        parts in prop::collection::vec(part(), 0..6),
        requests in prop::collection::vec(asked(), 1..5),
    ) {
        let text = written(&parts);
        let configuration = configuration(&format!(
            "location /rewrite/ {{ rewrite ^/rewrite/(.*)/(.*)$ \"/echo{text}\" last; }}
             location /set/ {{ if ($uri ~ ^/set/(.*)/(.*)$) {{ set $value \"{text}\"; }} return 200 \"$value\"; }}
             location ~ ^/text/(.*)/(.*)$ {{ return 200 \"{text}\"; }}
             location /echo {{ return 200 \"$uri?$args\"; }}"
        ));
        let simulation = Simulation::new(0, Faults::NONE);
        run(&simulation, &configuration, async |_| {
            for request in &requests {
                let got = |place| ask(request.path(place));
                assert_eq!(got("rewrite").await.0, request.rewritten(&parts), "{text} {request:?}");
                assert_eq!(got("set").await.0, request.text(&parts, true), "{text} {request:?}");
                assert_eq!(got("text").await.0, request.text(&parts, false), "{text} {request:?}");
            }
        });
    }
}

#[test]
fn slow_look_at_a_file_delays_no_others() {
    const SLOW: Duration = Duration::from_secs(10);
    let faults = Faults { cold_files: 1000, task_max: SLOW, ..Faults::NONE };
    let configuration = configuration(
        "location = /quick { return 200 quick; }
         location /slow/ {
             set $trace \"\";
             if (-f /www/file) { set $trace \"${trace}f\"; }
             if (!-d /www/$arg_a) { set $trace \"${trace}d\"; }
             if ($arg_a = x) { set $trace \"${trace}x\"; }
             if (-e /none) { set $trace never; }
             return 200 $trace;
         }",
    );
    let mut waited = Duration::ZERO;
    for seed in 0..20 {
        let simulation = Simulation::new(seed, faults);
        simulation.add_file("/www/file", b"x").expect("memory for it");
        waited += run(&simulation, &configuration, async |_| {
            let begun = simulation.now();
            let slow = Task::spawn(ask("/slow/?a=x".to_owned()));
            let (text, at) = ask("/quick".to_owned()).await;
            assert!(text == "quick" && at.since(begun) < Duration::from_secs(1), "seed {seed}: {:?}", at.since(begun));
            let (text, at) = slow.take().await;
            assert_eq!(text, "fdx", "seed {seed}");
            at.since(begun)
        });
    }
    // Three checks of at most ten seconds each: the average was half of that.
    assert!(waited > SLOW * 20, "the files were not slow at all: {waited:?}");
}
