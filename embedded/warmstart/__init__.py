"""The policy that training starts from: scripted demonstrations and imitation of them."""
