//! Runs one operation so many times, for a tool that counts instructions: `python -m benches.instructions`.
//!
//! Only what happens within `measured` is meant to be counted. Without arguments it lists the operations.

mod work;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let [name, count] = arguments.as_slice() else {
        work::OPERATIONS.iter().for_each(|(name, _)| println!("{name}"));
        return;
    };
    let count: u64 = count.parse().expect("a number of times");
    let (_, setup) = work::OPERATIONS.iter().find(|(known, _)| known == name).expect("the name of an operation");
    let mut run = setup();
    // What happens once, such as the first growth of a list, is not the operation's.
    (0..100).for_each(|_| run());
    measured(&mut run, count);
}

#[inline(never)]
fn measured(run: &mut work::Operation, count: u64) {
    (0..count).for_each(|_| run());
}
