//! HTTP/2 frames: reading at once and byte by byte give the same result, reading always makes progress, and the lengths
//! of data add up.

use gale_protocol::http2::error::FrameFault;
use gale_protocol::http2::frame::{Frame, FrameReader};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    // The first byte selects the side.
    let Some((&choice, input)) = data.split_first() else { return };
    let whole = read(choice, &mut std::iter::once(input));
    assert_eq!(whole, read(choice, &mut input.chunks(1)));
    assert_eq!(whole, read(choice, &mut input.chunks(1 + usize::from(choice))));
}

/// Returns the frames as text, with the bytes that their ranges refer to.
fn read(choice: u8, pieces: &mut dyn Iterator<Item = &[u8]>) -> (Vec<String>, Option<FrameFault>) {
    let mut reader = match choice & 1 {
        0 => FrameReader::of_client(16_384),
        _ => FrameReader::of_server(20_000),
    };
    let (mut frames, mut buffer, mut data, mut left) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for piece in pieces {
        buffer.extend_from_slice(piece);
        let mut at = 0;
        loop {
            let step = match reader.read(&buffer[at..]) {
                Ok(step) => step,
                Err(fault) => return (frames, Some(fault)),
            };
            let input = &buffer[at..];
            at += step.consumed;
            assert!(at <= buffer.len());
            match step.frame {
                None if step.consumed == 0 => break,
                None => {}
                Some(Frame::DataBegin { content, length, .. }) => {
                    assert!(left == 0 && content <= length);
                    left = content;
                    frames.push(format!("{:?}", step.frame));
                }
                Some(Frame::Data { piece, is_last }) => {
                    assert!(!piece.is_empty() && piece.len() <= left as usize);
                    left -= piece.len() as u32;
                    assert_eq!(is_last, left == 0);
                    data.extend_from_slice(&input[piece]);
                    if is_last {
                        frames.push(format!("{:?}", std::mem::take(&mut data)));
                    }
                }
                Some(frame) => {
                    if let Frame::Headers { fragment, .. } | Frame::Continuation { fragment, .. } = &frame {
                        assert!(fragment.end <= step.consumed);
                    }
                    frames.push(format!("{frame:?} {:?}", &input[..step.consumed]));
                }
            }
        }
        assert!(buffer.len() - at < reader.input_max());
        buffer.drain(..at);
    }
    (frames, None)
}
